"""Writes short simple English stories from a seeded grammar.

This is the only source of training text for the tiny hybrid model.  Nothing is
read from outside this file.

    python generate_text.py --seed 1 --stories 5      # print some stories

In the templates, [a|b] picks one alternative (brackets may nest) and {x.y}
inserts a word of the story's world, so that names, pronouns, places and things
stay the same through a story.
"""

import argparse
import random
import re

GIRLS = ("Mia Anna Lily Rosa Emma Nora Lucy Ella Zoe Ruby Clara Ivy Sara Maya Jane "
         "Alice Tess Hana").split()
BOYS = ("Tom Ben Max Leo Sam Jack Finn Noah Adam Luke Oscar Hugo Theo Omar Peter "
        "Will Eli Ravi").split()
ANIMAL_NAMES = ("Pip Bella Rusty Momo Daisy Toby Hazel Milo Poppy Bruno Coco Fern Willow "
                "Biscuit Pepper Otto Juno Nibbles").split()
FEMALE_ANIMALS = set("Bella Momo Daisy Hazel Poppy Coco Fern Willow Juno".split())
ANIMALS = ("fox|rabbit|bear|mouse|squirrel|hedgehog|owl|duck|frog|badger|deer|turtle|cat|dog|"
           "otter|lamb|pony|beaver").split("|")
SOUNDS = {"kitten": "meow", "puppy": "woof", "duckling": "peep", "lamb": "baa",
          "chick": "cheep", "bird": "tweet"}


class Who:
    """A person or an animal with a name and fitting pronouns."""

    def __init__(self, name, female, kind, adj):
        self.name, self.kind, self.adj = name, kind, adj
        self.animal = kind not in ("girl", "boy")
        self.he, self.him, self.his, self.himself = (
            ("she", "her", "her", "herself") if female else ("he", "him", "his", "himself"))
        self.He, self.His = self.he.capitalize(), self.his.capitalize()
        # How later sentences may call this one.
        self.the = f"the {kind}" if self.animal else name
        self.The = f"The {kind}" if self.animal else name

    def __str__(self):
        return self.name


class Thing:
    def __init__(self, adj, noun, **more):
        self.adj, self.noun = adj, noun
        self.a, self.the = f"a {adj} {noun}", f"the {adj} {noun}"
        self.A, self.The = f"A {adj} {noun}", f"The {adj} {noun}"
        self.__dict__.update(more)

    def __str__(self):
        return self.noun


class Place:
    def __init__(self, the, at, spots, sights):
        self.the, self.at = the, at
        self.At = at[0].upper() + at[1:]
        self.spots, self.sights = spots.split("|"), sights.split("|")

    def __str__(self):
        return self.the


PLACES = [
    Place("the park", "in the park",
          "under the bench|behind the big tree|next to the fountain|near the swings|in the flower bed",
          "a boy with a yellow balloon|two ducks on the grass|a man selling ice cream|children on the swings"),
    Place("the forest", "in the forest",
          "under a bush|behind an old oak tree|next to a mossy rock|inside a hollow log|between the roots of a tree",
          "red mushrooms under the trees|a woodpecker high in a tree|tall green ferns|tracks in the soft mud"),
    Place("the beach", "on the beach",
          "under a wet towel|behind a big rock|next to a sand castle|between the shells|near the water",
          "a white boat far away|seagulls over the waves|a crab on the sand|shells in every color"),
    Place("the farm", "at the farm",
          "under the wagon|behind the barn|next to the henhouse|in the hay|near the gate",
          "brown cows in the field|a rooster on the fence|a red tractor|pigs in the mud"),
    Place("the market", "at the market",
          "under a table|behind the bread stand|next to a basket of apples|near the flower stand|between two boxes",
          "baskets full of apples|a woman selling flowers|cheese as round as the moon|a man with a violin"),
    Place("the river", "by the river",
          "under the bridge|behind a willow tree|next to a flat stone|in the tall grass|near the old boat",
          "small fish in the clear water|a blue dragonfly|a heron on one leg|leaves on the water like little boats"),
    Place("the meadow", "in the meadow",
          "under a daisy|behind a gray stone|next to the wooden fence|in the tall grass|near the little stream",
          "butterflies over the flowers|bees in the clover|a cloud like a sheep|yellow flowers everywhere"),
    Place("the garden", "in the garden",
          "under the rose bush|behind the shed|next to the watering can|between the carrots|near the apple tree",
          "a snail on a leaf|ripe red tomatoes|a robin on the fence|pumpkins as big as chairs"),
    Place("the hill", "on the hill",
          "under a pine tree|behind a tall rock|next to the path|in the dry leaves|near the old windmill",
          "the whole village below|a kite in the sky|sheep on the path|the blue sea far away"),
    Place("the lake", "at the lake",
          "under the little pier|behind the reeds|next to a red canoe|in the wet sand|near the boat house",
          "two swans on the water|a frog on a lily pad|the mountains in the water|an old man with a fishing rod"),
]

TOYS = [Thing(a, n) for n, adjs in {
    "ball": "red blue green yellow", "kite": "red blue yellow purple", "hat": "green blue woolen straw",
    "scarf": "red warm striped soft", "book": "old blue thick little", "drum": "red little loud",
    "key": "small silver golden", "bell": "tiny silver golden", "boat": "wooden little white",
    "teddy bear": "brown soft old", "lantern": "little old bright", "button": "shiny blue round",
    "whistle": "silver wooden tin", "basket": "brown round little", "umbrella": "yellow red big",
    "train": "wooden blue toy", "mitten": "red woolen warm", "spoon": "silver wooden little",
}.items() for a in adjs.split()]

FOODS = ("apple pie|chocolate cake|carrot soup|strawberry jam|warm bread|pumpkin soup|honey cake|"
         "banana bread|blueberry muffins|vegetable stew|ginger cookies|cheese toast").split("|")
PARTS = {"apple pie": "apples and butter", "chocolate cake": "eggs and chocolate",
         "carrot soup": "carrots and onions", "strawberry jam": "strawberries and sugar",
         "warm bread": "flour and yeast", "pumpkin soup": "pumpkin and cream",
         "honey cake": "honey and eggs", "banana bread": "bananas and flour",
         "blueberry muffins": "blueberries and milk", "vegetable stew": "potatoes and beans",
         "ginger cookies": "ginger and sugar", "cheese toast": "bread and cheese"}
PLANTS = [("sunflower", "tall and yellow"), ("tomato plant", "full of red tomatoes"),
          ("pumpkin vine", "long and green"), ("rose bush", "covered with pink flowers"),
          ("bean plant", "taller than the fence"), ("apple tree", "small but strong"),
          ("strawberry plant", "full of sweet berries"), ("tulip", "as red as a fire truck")]
CHILD_ADJ = "little|young|kind|curious|clever|brave|quiet|cheerful"
ANIMAL_ADJ = "little|small|young|curious|clever|shy|brave|gentle"


def expand(rng, text):
    """Resolve [a|b] from the inside out."""
    inner = re.compile(r"\[([^\[\]]*)\]")
    while (m := inner.search(text)):
        text = text[:m.start()] + rng.choice(m.group(1).split("|")) + text[m.end():]
    return text


class Story:
    def __init__(self, rng):
        self.rng = rng
        self.w = {}
        kind = rng.random()
        animals = kind < 0.42
        names = rng.sample(ANIMAL_NAMES, 2) if animals else None
        if animals:
            k1, k2 = rng.sample(ANIMALS, 2)
            self.A = Who(names[0], names[0] in FEMALE_ANIMALS, k1, rng.choice(ANIMAL_ADJ.split("|")))
            self.B = Who(names[1], names[1] in FEMALE_ANIMALS, k2, rng.choice(ANIMAL_ADJ.split("|")))
        else:
            self.A, self.B = self.child(), self.child()
            while self.B.name == self.A.name:
                self.B = self.child()
        self.P = rng.choice(PLACES)
        self.T = rng.choice(TOYS)
        s1, s2, s3 = rng.sample(self.P.spots, 3)
        parent = rng.choice(["mother", "father", "grandmother", "grandfather"])
        food = rng.choice(FOODS)
        plant, grown = rng.choice(PLANTS)
        baby = rng.choice(list(SOUNDS))
        self.w = dict(
            A=self.A, B=self.B, P=self.P, T=self.T, s1=s1, s2=s2, s3=s3,
            sight=rng.choice(self.P.sights), parent=parent,
            pshe="she" if parent.endswith("mother") else "he",
            PShe="She" if parent.endswith("mother") else "He",
            food=food, parts=PARTS[food], plant=plant, grown=grown,
            baby=baby, sound=SOUNDS[baby], Sound=SOUNDS[baby].capitalize())

    def child(self):
        female = self.rng.random() < 0.5
        return Who(self.rng.choice(GIRLS if female else BOYS), female,
                   "girl" if female else "boy", self.rng.choice(CHILD_ADJ.split("|")))

    def say(self, text):
        text = expand(self.rng, text).format(**self.w)
        text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
        text = re.sub(r"\s+", " ", text).strip()
        return re.sub(r" ([.,!?])", r"\1", text)

    # ---- openings -------------------------------------------------------

    def meet(self):
        """Introduce A alone."""
        options = [
            "Once upon a time, there was a {A.adj} {A.kind} named {A}. [{A.He} lived in a [small|cozy|little] "
            "house near {P}.|{A.He} loved [to play outside|long walks|funny songs|the smell of rain].|]",
            "Once upon a time, [a {A.adj} {A.kind} named {A} lived near {P}|there lived a {A.adj} {A.kind} "
            "near {P}. {A.His} name was {A}].",
            "There was once a {A.adj} {A.kind} called {A}. [{A.He} had a friend named {B}.|Everyone liked {A.him}.|]",
            "{A} was a {A.adj} {A.kind}. [{A.He} lived near {P}.|{A.He} liked [stories|music|warm days|surprises] "
            "very much.|]",
            "One [sunny|cold|windy|bright|quiet|warm] [morning|day|afternoon], {A} the {A.kind} "
            "[sat by the door|felt happy|had nothing to do|looked out of the window].",
        ]
        if self.A.animal:
            options += [
                "The {A.adj} {A.kind} lived [near {P}|in a cozy den near {P}|all alone near {P}]. {A.His} name was {A}.",
                "The little {A.kind} [was called {A}|had a lovely name. {A.He} was called {A}]. {A.He} lived near {P}.",
                "A {A.adj} {A.kind} named {A} lived near {P}.",
            ]
        else:
            options += [
                "{A} lived with {A.his} {parent} in a [small|white|cozy] house near {P}.",
                "In the morning, {A} [woke up early|put on {A.his} [boots|coat|shoes]|ran down the stairs|"
                "opened the window]. [The sun was shining.|It was a [beautiful|cold|warm] day.|]",
            ]
        return self.rng.choice(options)

    def pair(self):
        """Introduce A and B together."""
        options = [
            "Once upon a time, there were two friends named {A} and {B}. [They lived near {P}.|"
            "They did everything together.|]",
            "Once upon a time, {A} and {B} [lived near {P}|were the best of friends].",
            "{A} and {B} were [best|good|old] friends. [They played together every day.|They lived near {P}.|]",
            "{A} and {B} [went to {P}|were playing {P.at}|walked to {P} together] [one sunny day|"
            "on a [warm|windy|cool] afternoon|after breakfast].",
            "{A} and {B} went to {P}. [The [sun was shining|sky was blue|wind was warm].|"
            "They sang a song on the way.|]",
            "In the morning, {A} and {B} [met {P.at}|went to {P}|had breakfast together]. "
            "[The sun was shining.|The air was fresh.|]",
            "One [sunny|windy|bright|warm] [morning|afternoon|day], {A} and {B} went to {P}.",
        ]
        if self.A.animal:
            options += [
                "The {A.adj} {A.kind} and the {B.adj} {B.kind} were [best|good] friends. Their names were {A} and {B}.",
                "The little {A.kind} had a friend. {A.His} friend was a {B.adj} {B.kind} named {B}. "
                "The {A.kind}'s name was {A}.",
                "Once upon a time, a {A.kind} named {A} and a {B.kind} named {B} lived near {P}.",
            ]
        return self.rng.choice(options)

    def meets_b(self):
        return ("[Just then|Soon|After a while|Then], {A} met " +
                ("{B} the {B.kind}." if self.B.animal else "{A.his} friend {B}."))

    END = ("[From that day on, they were best friends.|They were both very happy.|It was [a wonderful|a lovely|a perfect] "
           "day.|Then they went home together.|They laughed all the way home.|And they never forgot that day.|"
           "That night, {A} slept very well.|{A} went home with a big smile.]")

    # ---- plots ----------------------------------------------------------

    def lost(self):
        return [self.meet(),
                "{A.He} had {T.a}, and {A.he} [loved it very much|took it everywhere|was very proud of it].",
                "One [day|morning|afternoon], {A} [went to {P}|took {T.the} to {P}|was playing {P.at}].",
                "[But when {A.he} wanted to go home, the {T} was gone.|Suddenly, {A.he} could not find the {T}.|"
                "After lunch, the {T} was not there anymore.]",
                "[\"Oh no!\" [said|cried] {A}. \"[Where is my {T}?|I have lost my {T}!|My {T} is gone!]\"|"
                "{A.The} was very sad and began to cry.]",
                self.meets_b(),
                "[\"[Why are you sad?|What is wrong?]\" asked {B}. \"I lost my {T},\" said {A}. |]"
                "\"[I will help you|Let us look for it together|Do not worry, we will find it],\" said {B}.",
                "[First, t|T]hey looked {s1}, but [it was not there|they only found [a leaf|an old shoe|a beetle]|"
                "there was nothing].",
                "[Then they looked {s2}, but it was not there either.|]",
                "[At last, {B} looked {s3}, and there was the {T}!|Then {A} looked {s3}. \"Here it is!\" {A.he} shouted.|"
                "Finally, they found the {T} {s3}.]",
                "[\"Thank you, {B}!\" said {A}. [\"You are a true friend.\"|]|{A} [hugged|thanked] {B} and "
                "[danced with joy|smiled].]", self.END]

    def rescue(self):
        return [self.meet(),
                "One [rainy|cold|windy|warm] [day|evening|morning], {A} [was walking {P.at}|went for a walk {P.at}] "
                "[and heard a small sound|when {A.he} heard a strange sound].",
                "\"{Sound}, {sound}!\" [It came from a place {s1}.|Something was {s1}.|]",
                "[{A}|{A.The}] looked {s1} and saw a [tiny|little|small] {baby}. [It was cold and wet.|It was stuck and could not move.|"
                "It had hurt its leg.|It was all alone and afraid.]",
                "\"[Do not be afraid|Poor little {baby}|Do not worry, little one],\" said {A}. \"I will help you.\"",
                "[{A.He} [gently|carefully] picked up the {baby} and [held it close|kept it warm in {A.his} "
                + ("paws" if self.A.animal else "arms") + "].|"
                "{A.He} gave the {baby} some [water|bread|milk] and spoke softly to it.]",
                "[\"Where is your mother?\" asked {A}. The {baby} only said, \"{Sound}.\"|Soon the {baby} felt much better.|]",
                "[They looked for its mother together. At last they found her {s2}.|Then {A} took the {baby} home and made a soft "
                "bed for it.|{A} asked {B} for help, and together they carried the {baby} home.]",
                "The {baby} [was safe and happy again|said \"{sound}\" and closed its eyes|was not afraid anymore].",
                "[From that day on, the {baby} came to see {A} every [day|morning].|{A} was glad that {A.he} had stopped to help.|"
                "{A} and the {baby} became good friends.]"]

    def rain(self):
        return [self.pair(),
                "They wanted to [fly a kite|have a picnic|play ball|pick flowers|swim|climb trees].",
                "[But then|Suddenly|Soon], [dark clouds came|the sky turned gray|the wind began to blow], and it started to [rain|pour].",
                "\"[Oh no, we will get wet!|What shall we do now?|Our day is ruined!]\" said {A}.",
                "\"[Come quickly|Follow me|I have an idea],\" said {B}. \"[We can wait {s1}|Let us run to my house|"
                "We can sit under my umbrella].\"",
                "So they [waited and told each other [stories|jokes|secrets]|sang songs and listened to the rain|"
                "ran as fast as they could and laughed all the way|drank hot tea and ate [bread|cookies|soup]].",
                "[After an hour|After a while|At last], the rain stopped and the sun came out [again|].",
                "[There was a [big|bright|beautiful] rainbow over {P}.|Everything was fresh and green.|The puddles were shining like mirrors.]",
                "\"[Look|How beautiful|See]!\" said {B}. \"[The rain was not so bad|Rain can be fun too|Now we can go outside again].\"",
                "[They jumped in all the puddles until it was dark.|Then they went outside and played until the evening.|"
                "{A} smiled and took {B} by the hand.]"
                if not self.A.animal else
                "[They jumped in all the puddles until it was dark.|Then they went outside and played until the evening.|"
                "{A} smiled, and they danced on the wet grass.]", ]

    def bake(self):
        return [self.meet(),
                "One [day|morning|Sunday], {A.he} wanted to make [some|] {food}.",
                "\"[First I need|I only need] {parts},\" [said|thought] {A}.",
                "{A.He} [went to the market|looked in the kitchen] and [found|got] [everything {A.he} needed|all of it].",
                "[{A}|{A.The}] [mixed and stirred|worked] for a long time. [Soon the whole house smelled [wonderful|sweet|good].|"
                "There was flour on {A.his} nose.|{A.He} sang while {A.he} worked.|]",
                "[Then there was a knock at the door. It was {B}.|Then {B} came in.|{B} was walking by and stopped at the window.]",
                "\"[What smells so good?|What are you making?]\" asked {B}. \"I made {food},\" said {A}. "
                "\"[Would you like some?|Sit down and eat with me.|There is enough for both of us.]\"",
                "They [sat at the table|sat in the sun|sat by the fire] and ate [every bite|it all|together].",
                "\"[This is the best {food} in the world|It is delicious|I have never eaten anything so good],\" said {B}.",
                "[{A} was very proud.|{A} smiled. Food tastes better with a friend.|The next day, {B} brought {A} "
                "[a basket of apples|a jar of honey|flowers] to say thank you.]"]

    def share(self):
        return [self.pair(),
                "[One day, they|They] [saw|found] {T.a} {s1}. [It was beautiful.|They had never seen such a fine {T}.|]",
                "\"[It is mine|I saw it first|I want it]!\" [said|cried|shouted] {A}. \"No, [it is mine|I saw it first|I want it]!\" "
                "[said|cried|shouted] {B}.",
                "They [pulled and pulled|argued for a long time|were both angry]. [Nobody was happy.|Neither of them wanted to stop.|]",
                "[Then an old [man|woman|owl|goat] came by.|{A}'s {parent} heard them and came over.] "
                "\"[A {T} is more fun with two,|Friends are worth more than a {T},|Why do you not share it?|"
                "You can take turns,]\" said [a kind voice|a gentle voice].",
                "{A} [looked at the ground|was quiet for a moment|thought about it]. \"I am sorry, {B},\" {A.he} said. "
                "\"[You can have it first|Let us share|We can take turns].\"",
                "\"I am sorry too,\" said {B}. [{B.He} smiled at {A}.|\"Let us play together.\"|]",
                "So they [took turns with the {T}|shared the {T}|played with the {T} together] until [the sun went down|dinner time|it was dark].",
                "[It was much more fun that way.|They were friends again.|Sharing made them both happy.]"]

    def brave(self):
        fear, act, where = self.rng.choice([
            ("the dark", "walk through the dark tunnel", "On the other side, there were a thousand stars"),
            ("deep water", "swim across the pond", "The water was cool, and it carried"),
            ("high places", "climb the tall tree", "From the top, the whole world looked small"),
            ("thunder", "sing as loud as the storm", "The thunder went away, and the song was still there"),
            ("the old bridge", "cross the old bridge", "On the other side, there was a field of flowers"),
            ("strangers", "say hello to the new neighbor", "The neighbor smiled and gave them cake"),
        ])
        self.w["fear"], self.w["act"] = fear, act
        if where.endswith("carried"):
            where += " {A} along"
        return [self.meet(),
                "[{A}|{A.The}] was [not afraid of much, but {A.he} was afraid|afraid] of {fear}.",
                "[One day|One evening|Then one day], {B} came to see {A.him}. \"[Come with me|Come along|I want to show you something],\" said {B}. "
                "\"[But first w|W]e [have to|must] {act}.\"",
                "\"[I cannot do that|No, I am too scared|I do not dare],\" said {A} [in a small voice|and shook {A.his} head|].",
                "\"[I will stay with you|We can do it together|You are braver than you think],\" said {B}. \"[Just try|Take a deep breath|"
                "Count to three].\"",
                "[{A}|{A.The}] [took a deep breath|closed {A.his} eyes|counted to three]. {A.His} heart beat [fast|like a drum]. Then {A.he} "
                "[began|tried|took the first step].",
                "[Slowly, slowly, it got easier.|It was not as bad as {A.he} had thought.|Step by step, {A.he} went on.]",
                where + ".",
                "\"[I did it|Look at me|I am not afraid anymore]!\" [cried|shouted|said] {A}.",
                "\"[I knew you could do it|You were very brave|Well done],\" said {B}.",
                "[After that day, {A} was never afraid of {fear} again.|{A} felt proud and strong.|" + self.END[1:]]

    def seed(self):
        return [self.meet(),
                "One [day|spring morning|morning], {A} found a [tiny|brown|strange little] seed {s1}.",
                "\"[What will you be?|I wonder what it is,|What a small seed!]\" said {A}.",
                "{A.He} [dug a hole and put the seed in the ground|planted it next to {A.his} house|put it in a pot of black soil].",
                "[Every day|Each morning], {A.he} gave it water. [But nothing happened.|But the ground stayed brown.|{A.He} waited and waited.]",
                "[\"You must be patient,\" said {B}. \"Good things take time.\"|\"Maybe it is asleep,\" said {B}.|"
                "{B} laughed and said, \"It will never grow.\" But {A} did not give up.]",
                "[It rained for a week, and then the sun came out.|Days went by, and then weeks.|The nights grew warmer.]",
                "[Then, one morning, there was a little green leaf!|One day, {A} saw something small and green.]",
                "It grew and grew. [By summer|At last|In the end], it was a {plant}, {grown}.",
                "\"[Look what you made|You were right to wait|How beautiful],\" said {B}.",
                "[{A} was so happy that {A.he} [danced|sang a song].|{A} gave {B} a new seed, and they planted it together.|"
                "Everyone came to see it, and {A} was very proud.]"]

    def owner(self):
        return [self.pair(),
                "[Near the path|On the ground|On the way], {A} saw something [shiny|strange|small]. It was {T.a}.",
                "\"[Whose {T} is this?|Who lost this {T}?]\" [asked|said] {A}. \"[I do not know|It is not mine],\" said {B}. "
                "\"[Let us find out|We should ask someone|Let us find the owner].\"",
                "[First t|T]hey asked the [baker|farmer|miller|teacher]. \"No, [it is not mine|I have never seen it],\" said the "
                "[good man|kind woman|old man].",
                "Then they asked [a girl with a dog|an old woman|a boy on a bicycle|the postman], but [it was the same answer|the answer was no].",
                "[At last|In the end|Finally], they saw [an old sailor|a small child|a tired musician|a young painter] [sitting {s1}|"
                "looking for something {s2}].",
                "\"[Is this your {T}?|Did you lose {T.a}?]\" asked {B}. \"[Yes|Oh yes]! [It was a gift from my {parent}|I have looked for it all day|"
                "I thought it was gone forever]!\"",
                "[\"Thank you, thank you!\"|The owner was so happy!|There were tears and then a big smile.]",
                "[As a reward, they each got [a cookie|a sweet apple|a silver coin].|{A} and {B} felt warm inside.|"
                "\"That was better than keeping it,\" said {A} on the way home.]"]

    def night(self):
        return [self.meet(),
                "One night, {A} could not sleep. [The moon was too bright.|The wind was too loud.|The house was too quiet.]",
                "{A.He} [turned to the left and to the right|counted sheep|looked at the ceiling], but [sleep did not come|{A.he} was still awake].",
                "[So|At last] {A.he} called {A.his} {parent}.",
                "\"[I cannot sleep|I am not tired],\" said {A}. {A.His} {parent} [smiled and sat down on the bed|came with a cup of warm milk|"
                "lit a small candle].",
                "\"[Look at the stars|Look out of the window],\" {pshe} said. \"[Every star is a little lamp|The moon watches over us|"
                "Even the {baby} is asleep now].\"",
                "[{A} looked up at the sky. There were so many stars!|{A} looked at the moon. It looked back like a kind face.]",
                "[Then {A.his} {parent} told {A.him} a story about [a ship|a dragon|a king|a whale] [who|that] [could not sleep either|"
                "sailed around the moon|lived in the clouds].|Then {A.his} {parent} sang a [soft|slow|quiet] song about {P}.]",
                "{A}'s eyes grew heavy. \"Good night,\" {A.he} whispered.",
                "[And before the [story|song] was over, {A} was asleep.|Soon {A} was dreaming of {P}.|And the moon shone all night long.]"]

    def build(self):
        self.w["X"], self.w["use"], self.w["did"], self.w["mat"] = self.rng.choice([
            ("kite", "flew", "fly high in the sky", "paper and string"),
            ("raft", "floated", "float on the water", "logs and rope"),
            ("tree house", "stood", "stand in the wind", "boards and nails"),
            ("cart", "rolled", "roll down the hill", "wheels and boards"),
            ("boat", "sailed", "sail across the lake", "wood and cloth"),
            ("snowman", "stood", "stand until spring", "snow and two sticks"),
            ("sand castle", "stood", "stand against the waves", "sand and shells")])
        return [self.pair(),
                "\"Let us build a {X},\" said {A}. \"[It will {did}!|It will be the best one ever!|We only need {mat}.]\"",
                "They [found|got|collected] {mat} and [went to work|started to build]. [It took all [morning|day].|{B} was very careful.|]",
                "But [the first {X} was too weak|the {X} was not good|something was wrong]. [Crash! It fell apart.|It broke in two.|It fell over at once.]",
                "\"[It will never work|I give up|We are not good at this],\" said {B}. [{B.He} was sad.|{B.He} sat down on the ground.|]",
                "\"[Let us try again|We must not give up|We can learn from this],\" said {A}. \"[This time we will make it stronger|Now we know what "
                "went wrong|I will hold it while you tie it].\"",
                "So they started again. [They worked slowly and carefully.|They helped each other.|They did not stop for lunch.]",
                "[This time|In the evening|At last], the {X} {use}! [It was perfect.|It did not break.|]",
                "\"[Hooray|We did it|It works]!\" they [shouted|cried].",
                "[Everyone came to look at the {X}.|They were tired but very happy.|They had learned never to give up.]"]

    def gift(self):
        return [self.meet(),
                "[Tomorrow was {B}'s birthday|It was {B}'s birthday|{B} was sick in bed], and {A} wanted to give {B.him} something [nice|special].",
                "\"[But what|What can I give {B.him}]?\" {A.he} [asked|thought]. \"[I have no money|It must be something {B.he} likes].\"",
                "{A.He} went to {P} [and looked around|to think]. [There {A.he} saw {sight}.|]",
                "[{A.He} picked [some flowers|a bag of nuts|sweet berries], but that was not enough.|{A.He} looked {s1} and {s2}, but found nothing.]",
                "Then [{A}|{A.the}] [had an idea|remembered something|smiled]. {A.He} [ran home and made {T.a} with {A.his} own hands|took {A.his} own {T}, "
                "the one {A.he} loved most, and wrapped it in paper].",
                "When {B} [opened|saw] the present, {B.his} eyes [shone|grew wide|lit up]. \"[It is wonderful|A {T}! For me|Just what I wanted]!\" said {B}.",
                "[\"I am glad you like it,\" said {A}.|{A} turned red with joy.|They both laughed.]",
                "[Then they ate {food} together.|{B} kept the {T} forever.|" + self.END[1:]]

    def race(self):
        return [self.pair(),
                "\"I am faster than you,\" said {A}. \"[Let us have a race|Let us run to {P}|I can beat you any day].\"",
                "\"[All right|Very well|Good],\" said {B}. \"[We will see|Let us start now|The first one at the [big rock|old gate|red barn] wins].\"",
                "One, two, three, go! {A} ran [as fast as the wind|very fast] and was soon far ahead.",
                "[On the way, {A} saw {sight} and stopped to look.|{A} was so sure that {A.he} lay down and took a nap.|But then {A} fell over a root "
                "and hurt {A.his} knee.]",
                "{B.The} [came slowly but never stopped|went on, step by step|did not look left or right].",
                "[\"Wait for me!\" cried {A}, but it was too late.|{A} jumped up and ran, but {B} was already there.|{B} turned around and asked, "
                "\"Are you all right?\" Then they walked on together.]",
                "[\"You won,\" said {A}. \"I should not have been so proud.\"|\"It does not matter who is first,\" said {B}.|\"Well done, {B},\" said {A}.]",
                "[They shook hands and shared an apple.|After that, {A} never bragged again.|" + self.END[1:]]

    def outing(self):
        return [self.pair(),
                "[There they saw {sight}.|\"Look!\" said {B}. They saw {sight}.]",
                "[\"This is lovely,\" said {A}. |]They [played hide and seek|sat down to eat|sang songs|made crowns of flowers|collected stones].",
                "[{A} hid {s1}, and {B} hid {s2}.|{B} found {T.a} {s1}.|{A} told a funny story, and {B} laughed and laughed.]",
                "[Then a [bee|butterfly|little {baby}] came and [sat on {A}'s nose|looked at them|sat down next to {B}].|"
                "Then they were hungry, so they ate [bread and cheese|apples|{food}].]",
                "\"[I never want to go home|I wish every day was like this|What a good day],\" said {B}.",
                "[When the sun went down|In the evening|When it was late], they [walked|went] home [slowly|together].",
                "\"[Good night|See you tomorrow|Sleep well], {B},\" said {A}. \"[Good night|See you tomorrow|Sleep well], {A},\" said {B}.",
                "[And they both slept well that night.|The next day, they went there again.|It was the best day of the [week|summer|year].]"]

    def text(self):
        plot = self.rng.choice([self.lost, self.rescue, self.rain, self.bake, self.share, self.brave, self.seed,
                                self.owner, self.night, self.build, self.gift, self.race, self.outing])
        text = " ".join(filter(None, (self.say(s) for s in plot())))
        if re.match(r"In the morning|One ", text):
            # The opening has set the time already.
            text = re.sub(r" (One|Then one) (\w+ )?(day|morning|afternoon|evening|Sunday), ",
                          " Later that day, ", text, count=1)
            text = text.replace(" One night, ", " That night, ", 1)
        return text


def story(rng):
    return Story(rng).text()


def stories(seed):
    """An endless stream of stories, fixed by the seed."""
    rng = random.Random(seed)
    while True:
        yield story(rng)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--stories", type=int, default=5)
    args = ap.parse_args()
    stream = stories(args.seed)
    for _ in range(args.stories):
        print(next(stream), end="\n\n")


if __name__ == "__main__":
    main()
